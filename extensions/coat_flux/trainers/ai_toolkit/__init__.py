"""The ai-toolkit side: process type, optimizer name and qtype.

The only folder that imports ai-toolkit (`toolkit`, `jobs`,
`extensions_built_in`). Why it is built so: docs/ai-toolkit.md.
"""
