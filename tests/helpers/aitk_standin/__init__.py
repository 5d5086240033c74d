"""A minimal program with ai-toolkit's interface (`checkout/`), and a fixture that runs our extension in it."""
