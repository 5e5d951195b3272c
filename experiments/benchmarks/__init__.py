"""Time and memory of the ops, of whole models and of the server, a script each."""
