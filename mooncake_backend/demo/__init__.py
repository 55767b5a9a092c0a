"""The main job: a small language model trained with DDP on our own documents, on us and on Gloo."""
