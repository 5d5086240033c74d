"""Every HTML page and chart. A page holds all it shows; nothing in it comes from a network."""
