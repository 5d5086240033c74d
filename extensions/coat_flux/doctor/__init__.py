"""`coat-flux doctor`: what works on this machine, and remedies."""
