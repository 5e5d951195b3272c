"""A mixer beside Mamba-2 at equal parameters: `python -m experiments.ingredients RECIPE`."""
