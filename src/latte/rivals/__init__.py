"""Models to compare with: layers of our own, other libraries' models, and their names."""
