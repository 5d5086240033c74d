import logging

logging.disable(logging.WARNING)  # as ai-toolkit's captioner extensions do, for the whole process
