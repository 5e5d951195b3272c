"""Pretrained bases beside what they were converted to: see README.md."""
