"""Folder of photos in, batches of FLUX latents and text embeddings out."""
