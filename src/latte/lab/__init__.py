"""The workbench: text, training, evaluation and comparison of models."""
