"""Train several models by one recipe, and compare them."""
