"""Training, evaluation and comparisons: the Trainer glue, metrics and reports.

Modules here import torch and transformers inside functions or in files that the command line
loads late, so that `latte --help` stays fast.
"""
