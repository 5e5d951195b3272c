"""`latte inspect`: what a trained model's latents do on a text, as numbers, figures and a page."""
