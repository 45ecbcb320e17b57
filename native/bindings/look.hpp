#pragma once

#include <pybind11/pybind11.h>

namespace datastates::python {

/// What a snapshot wants to know of each array of a list, in one pass over them, as bytes:
///
/// - places: where each lies and how it is laid out, as words end to end: equal for two lists
///   exactly when their arrays have, in order, the same types, addresses, devices, element types,
///   shapes and strides;
/// - identities: the objects' own addresses;
/// - addresses: of the first elements;
/// - versions: torch's count of changes in place, -1 for an array without.
///
/// The last three are 64-bit words, one an array. None when one of them does not offer DLPack's C
/// exchange API, or not for what it holds.
pybind11::object look(const pybind11::list& arrays);

}  // namespace datastates::python
