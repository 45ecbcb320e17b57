#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "datastates/plan.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {

void bind_plans(py::module_& module) {
    using U64 = std::uint64_t;
    using I32 = std::int32_t;
    py::class_<WritePlan, std::shared_ptr<WritePlan>>(module, "WritePlan")
        .def(py::init([](const py::kwargs& given) {
            const BytesView literal_view(given["literal"].cast<py::buffer>());
            const WritePlanArrays arrays{
                .source_nbytes = column<U64>(given, "source_nbytes"),
                .chunk_bytes = given["chunk_bytes"].cast<std::uint64_t>(),
                .literal = literal_view.bytes(),
                .extent_offset = column<U64>(given, "extent_offset"),
                .extent_length = column<U64>(given, "extent_length"),
                .extent_piece = column<U64>(given, "extent_piece"),
                .piece_source = column<I32>(given, "piece_source"),
                .piece_source_offset = column<U64>(given, "piece_source_offset"),
                .piece_extent_offset = column<U64>(given, "piece_extent_offset"),
                .piece_length = column<U64>(given, "piece_length"),
                .patch_extent = column<U64>(given, "patch_extent"),
                .patch_offset = column<U64>(given, "patch_offset"),
                .patch_source = column<I32>(given, "patch_source"),
                .eager = column<std::uint8_t>(given, "eager"),
                .runs_source = column<I32>(given, "runs_source"),
                .runs = runs_arrays(given, "runs_")};
            const py::gil_scoped_release release;
            return std::make_shared<WritePlan>(arrays);
        }));
    py::class_<ReadPlan, std::shared_ptr<ReadPlan>>(module, "ReadPlan")
        .def(py::init([](const py::kwargs& given) {
            const ReadPlanArrays arrays{
                .dest_nbytes = column<U64>(given, "dest_nbytes"),
                .extent_offset = column<U64>(given, "extent_offset"),
                .extent_length = column<U64>(given, "extent_length"),
                .extent_shared = column<std::uint8_t>(given, "extent_shared"),
                .extent_span = column<U64>(given, "extent_span"),
                .span_offset = column<U64>(given, "span_offset"),
                .span_length = column<U64>(given, "span_length"),
                .span_count = column<U64>(given, "span_count"),
                .span_step = column<U64>(given, "span_step"),
                .extent_piece = column<U64>(given, "extent_piece"),
                .piece_dest = column<I32>(given, "piece_dest"),
                .piece_dest_offset = column<U64>(given, "piece_dest_offset"),
                .piece_extent_offset = column<U64>(given, "piece_extent_offset"),
                .piece_length = column<U64>(given, "piece_length"),
                .piece_count = column<U64>(given, "piece_count"),
                .piece_extent_step = column<U64>(given, "piece_extent_step"),
                .piece_dest_step = column<U64>(given, "piece_dest_step"),
                .extent_check = column<U64>(given, "extent_check"),
                .check_offset = column<U64>(given, "check_offset"),
                .check_length = column<U64>(given, "check_length"),
                .check_crc = column<std::uint32_t>(given, "check_crc"),
                .check_record = column<I32>(given, "check_record")};
            const py::gil_scoped_release release;
            return std::make_shared<ReadPlan>(arrays);
        }));
}

}  // namespace datastates::python
