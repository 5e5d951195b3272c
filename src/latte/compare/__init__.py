"""Several models by one recipe, put side by side."""
