"""The paper's experiments beside language modelling, run from a clone: not part of the wheel."""
