"""Multi-query associative recall (MQAR): `python -m replication.mqar RECIPE`."""
