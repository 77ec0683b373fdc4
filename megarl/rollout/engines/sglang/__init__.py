"""SGLang's servers, started here or running already, behind the engine protocol; `on_cpu/` makes them serve without a GPU."""
