#pragma once

#include <pybind11/pybind11.h>

namespace datastates::python {

/// Where each array of a list lies and how it is laid out, as words end to end: equal for two lists
/// exactly when their arrays have, in order, the same types, addresses, devices, element types,
/// shapes and strides. None when one of them does not offer DLPack's C exchange API, or not for
/// what it holds. Some tens of nanoseconds an array.
pybind11::object layouts(const pybind11::list& arrays);

}  // namespace datastates::python
