"""Training by a recipe: one folder, start or resume, always to the same weights."""
