"""Training as people practise it: each recipe of the documentation, beside the plain model."""
