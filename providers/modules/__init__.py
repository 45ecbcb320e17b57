"""Providers of modules of torch: a restore leaves in them what their ``load_state_dict`` leaves."""
