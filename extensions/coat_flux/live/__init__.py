"""The live page of a run: `coat-flux watch`, `coat-flux train --watch`.

server.py   who may read and who may ask for something; HTTP by werkzeug
view.py     what there is to see of a run now, from the files in its folder
shell.py    the page around it, and its few lines of script
"""

from .server import Watch

__all__ = ["Watch"]
