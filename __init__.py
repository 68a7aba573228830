"""The node pack's door: ComfyUI imports this; the nodes themselves are imported when ComfyUI asks for them."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    """ComfyUI's V3 entry point: the extension that lists our nodes."""
    from .nodes import LTXTrainExtension

    return LTXTrainExtension()
