"""Training on given responses: supervised fine-tuning, reward models and preferences; `loop.py` is the loop."""
