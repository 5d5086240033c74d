"""The stand-alone training engine; import `coat_flux.engine.trainer` (it needs diffusers, peft and accelerate)."""
