"""Kept tokens: which ones? Scores in a pretrained decoder, before anything is trained with them."""
