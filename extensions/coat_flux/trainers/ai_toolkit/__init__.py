"""The ai-toolkit side: process type, optimizer name and qtype (docs/ai-toolkit.md).

The only folder that imports ai-toolkit (`toolkit`, `jobs`, `extensions_built_in`).
"""
