"""vLLM as an engine, for whoever has it installed: `engine`. Nothing is imported from it before it
is started (`starting`); what comes from its inside stands in `extension`."""
