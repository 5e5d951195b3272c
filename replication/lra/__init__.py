"""Long Range Arena: `python -m replication.lra RECIPE`."""
