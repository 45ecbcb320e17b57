#pragma once

#include <pybind11/pybind11.h>

namespace datastates::python {

/// What a snapshot wants to know of each array of a list, in one pass over them, as bytes:
///
/// - places: where each lies and how it is laid out, as words end to end: equal for two lists
///   exactly when their arrays have, in order, the same types, addresses, devices, element types,
///   shapes and strides;
/// - addresses: of the first elements;
/// - versions: torch's count of changes in place, -1 for an array without;
///
/// the last two of which are 64-bit words, one an array; and a list of what `memory_of` gives for
/// each array, empty where that is None. None when one of them does not offer DLPack's C exchange
/// API, or not for what it holds, or is of none of the types in `plain`, if that has any.
pybind11::object look(const pybind11::list& arrays, const pybind11::object& memory_of,
                      const pybind11::tuple& plain);

/// How each array of a list is laid out, as columns of bytes:
///
/// - addresses: of the first elements;
/// - devices, elements: device and element type, as words that are equal for equal ones: DLPack's
///   numbers for the kind and the number of the device, and for code, lanes and bits of the type;
/// - ndim: a byte each; dims, strides: shapes and strides in elements, arrays end to end.
///
/// All but ndim are 64-bit words. None as for look().
pybind11::object layout(const pybind11::list& arrays);

}  // namespace datastates::python
