"""Saved LoRAs for other programs: the check after every save, and conversion between key layouts."""
