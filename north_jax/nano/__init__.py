"""North Nano, the embedded default model: the files beside this one, in the Hugging Face layout. See MODEL_CARD.md."""
