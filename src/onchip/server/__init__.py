"""An OpenAI-compatible server over the engine: `onchip serve`. Needs the extra `serve`."""
