"""What a trained model can do: perplexity by context length, tasks, samples, speed."""
