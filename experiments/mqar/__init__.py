"""Multi-query associative recall (MQAR): `python -m experiments.mqar RECIPE`."""
