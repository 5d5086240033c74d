"""A saved LoRA as others read it: the check after every save, and conversion between key layouts."""
