"""Folder of photos in, batches of FLUX latents and text embeddings out.

images (read any file as sRGB) · captions (sidecar text, trigger word) · buckets (aspect-ratio sizes) · dataset (scan,
order of batches) · cache (encoding, tensors on disk) · loader (what the training loop consumes).
"""
