"""The engine: trains LoRAs for the LTX models. Knows nothing of ComfyUI."""
