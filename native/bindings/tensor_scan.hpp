#pragma once

#include <pybind11/pybind11.h>

namespace datastates::python {

/// Looks at each array of a list in one pass. Returns a tuple of three bytes objects of 64-bit
/// words and a list:
///
/// - places: the arrays' types, addresses, devices, element types, shapes and strides. Two lists
///   have equal places exactly when these are equal, in order. Places that equal `known` are that
///   object;
/// - addresses: the address of each array's first element;
/// - versions: torch's count of changes in place of each array, -1 for an array without one;
/// - the results of `memory_of` for each array; empty if `memory_of` is None.
///
/// Returns None for an array that cannot be looked at by DLPack's C exchange API. Also for one of
/// which `is_negated` says True, and for one of a type that is not in `plain`. An `is_negated` of
/// None, or an empty `plain`, refuses nothing. Needs the GIL.
pybind11::object look(const pybind11::list& arrays, const pybind11::bytes& known,
                      const pybind11::object& memory_of, const pybind11::object& is_negated,
                      const pybind11::tuple& plain);

/// The layout of each array of a list, as a tuple of six bytes objects. All are 64-bit words but
/// ndim, which has a byte for each array:
///
/// - addresses: the address of each array's first element;
/// - devices: DLPack's type and number of each device, in one word;
/// - elements: DLPack's code, lanes and bits of each element type, in one word;
/// - ndim, dims, strides: shapes and strides in elements, array after array.
///
/// Returns None when an array cannot be looked at, has more than 255 dimensions, or when
/// `is_negated` says True of it. Needs the GIL.
pybind11::object layout(const pybind11::list& arrays, const pybind11::object& is_negated);

}  // namespace datastates::python
