"""The engine: trains LoRAs for the LTX models. Knows nothing of ComfyUI."""

__version__ = "0.1.0"
