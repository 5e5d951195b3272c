"""Long Range Arena: `python -m experiments.lra RECIPE`."""
