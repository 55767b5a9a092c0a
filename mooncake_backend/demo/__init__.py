"""Trains a small language model with DDP on our own documents, over our backend and over Gloo."""
