"""The machine: what it is, what a call costs on it, and work in a process of its own."""
