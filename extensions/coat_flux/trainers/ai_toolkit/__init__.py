"""The only folder that imports ai-toolkit: process type, optimizer name and qtype (docs/ai-toolkit.md)."""
