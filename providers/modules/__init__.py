"""Providers of torch modules. After a restore a module is as after its ``load_state_dict``."""
