#pragma once

#include <pybind11/pybind11.h>

namespace datastates::python {

/// Splits a value of nested containers by the form of an earlier one. A form is a tuple for each
/// container: its type (dict, OrderedDict, list or tuple); a dict's keys as a list, or the length
/// of a list or tuple; its items: None if all are arrays, True if all are plain values, else a list
/// with None, True or a form for each; and the attributes of an OrderedDict as a dict.
///
/// Returns a tuple of two lists, the items that are arrays and those that are plain values, in the
/// order of the form. Whatever is in an array's place counts as an array. Returns None if the
/// value has another form, if it has a dict or list twice, or if `is_plain` denies a plain value.
/// Needs the GIL.
pybind11::object split(const pybind11::tuple& form, const pybind11::object& value,
                       const pybind11::object& is_plain);

/// The tensors that `state_dict(keep_vars=True)` of a torch module returns, in its order, and a
/// list of all else that the result depends on: torch's methods, then classes, versions and names,
/// module by module. Two modules of equal lists have equal keys and metadata. Returns a tuple of
/// the two lists.
///
/// `base` is torch's Module. Returns None if a module or a class in it has a say in its state, by
/// a hook or a method, or is no usual one in another way. Needs the GIL.
pybind11::object module_tensors(const pybind11::object& module, const pybind11::object& base);

}  // namespace datastates::python
