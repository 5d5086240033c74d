"""Folder of photos in, batches of FLUX latents and text embeddings out.

Reading: images (any photo as sRGB) · captions (sidecar text, trigger word, what is wrong with them).
Looking before training: files (what is in a folder) · preflight (each photo read in full, all findings) ·
sheet (contact sheet) · check (the same from a job).
Training: buckets (aspect-ratio sizes, samples) · dataset (scan, order of batches) · cache (encoding, tensors on disk)
· loader (what the training loop consumes). prepare makes the corrected copy that ai-toolkit trains on.
"""
