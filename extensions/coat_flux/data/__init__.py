"""Folder of photos in, batches of FLUX latents and text embeddings out.

Reading: images (any photo as sRGB) · colour (ICC profiles) · captions (sidecar text, trigger word).
Looking before training: files (what is in a folder) · survey (each photo read in full) · caption_lint · preflight
(all findings) · sheet (contact sheet).
Training: samples · buckets (aspect-ratio sizes) · dataset (scan, order of batches) · cache (encoding, tensors on disk)
· loader (what the training loop consumes). prepare makes the corrected copy that ai-toolkit trains on.
"""
