"""Models that need no download: a mini-FLUX that draws clothes, and FLUX.1-dev's geometry with random weights."""
