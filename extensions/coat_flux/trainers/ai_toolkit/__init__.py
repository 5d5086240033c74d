"""The ai-toolkit side: process type `coat_flux_trainer`, optimizer `coat_fp8_adamw`, qtype `coat_fp8`.

The only folder that imports ai-toolkit (`toolkit`, `jobs`, `extensions_built_in`), and only inside functions or in
`process`, which is loaded by ai-toolkit itself. The facts about ai-toolkit behind the choices here: docs/ai-toolkit.md.
"""
