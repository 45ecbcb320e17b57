#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "arrays.hpp"
#include "bind.hpp"
#include "datastates/plan.hpp"
#include "datastates/write/replica_digests.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace datastates::python {

void bind_plans(py::module_& module) {
    py::class_<WritePlan, std::shared_ptr<WritePlan>>(module, "WritePlan")
        .def(
            py::init([](const py::array& source_nbytes, std::uint64_t chunk_bytes,
                        const py::buffer& literal, const py::array& extent_offset,
                        const py::array& extent_length, const py::array& extent_piece,
                        const py::array& piece_source, const py::array& piece_source_offset,
                        const py::array& piece_extent_offset, const py::array& piece_length,
                        const py::array& patch_extent, const py::array& patch_offset,
                        const py::array& patch_source, const py::array& patch_after,
                        const py::array& eager, std::uint64_t digests, const py::array& runs_source,
                        const py::array& runs_offset, const py::array& runs_length,
                        const py::array& runs_run_length, const py::array& runs_after,
                        const py::array& runs_step, const py::array& runs_digest) {
                using U64 = std::uint64_t;
                using I32 = std::int32_t;
                const BytesView literal_view(literal);
                const WritePlanArrays arrays{
                    .source_nbytes = elements<U64>(source_nbytes, "source_nbytes"),
                    .chunk_bytes = chunk_bytes,
                    .literal = literal_view.bytes(),
                    .extent_offset = elements<U64>(extent_offset, "extent_offset"),
                    .extent_length = elements<U64>(extent_length, "extent_length"),
                    .extent_piece = elements<U64>(extent_piece, "extent_piece"),
                    .piece_source = elements<I32>(piece_source, "piece_source"),
                    .piece_source_offset =
                        elements<U64>(piece_source_offset, "piece_source_offset"),
                    .piece_extent_offset =
                        elements<U64>(piece_extent_offset, "piece_extent_offset"),
                    .piece_length = elements<U64>(piece_length, "piece_length"),
                    .patch_extent = elements<U64>(patch_extent, "patch_extent"),
                    .patch_offset = elements<U64>(patch_offset, "patch_offset"),
                    .patch_source = elements<I32>(patch_source, "patch_source"),
                    .patch_after = elements<U64>(patch_after, "patch_after"),
                    .eager = elements<std::uint8_t>(eager, "eager"),
                    .runs_source = elements<I32>(runs_source, "runs_source"),
                    .runs = runs_arrays(digests, runs_offset, runs_length, runs_run_length,
                                        runs_after, runs_step, runs_digest)};
                const NoGil released;
                return std::make_shared<WritePlan>(arrays);
            }),
            py::kw_only(), "source_nbytes"_a, "chunk_bytes"_a, "literal"_a, "extent_offset"_a,
            "extent_length"_a, "extent_piece"_a, "piece_source"_a, "piece_source_offset"_a,
            "piece_extent_offset"_a, "piece_length"_a, "patch_extent"_a, "patch_offset"_a,
            "patch_source"_a, "patch_after"_a, "eager"_a, "digests"_a, "runs_source"_a,
            "runs_offset"_a, "runs_length"_a, "runs_run_length"_a, "runs_after"_a, "runs_step"_a,
            "runs_digest"_a)
        .def_property_readonly("eager_extents", &WritePlan::eager_extents)
        .def_property_readonly("file_length", &WritePlan::file_length);
    py::class_<ReplicaRanges, std::shared_ptr<ReplicaRanges>>(module, "ReplicaRanges")
        .def(py::init([](const py::array& device, const py::array& stream, const py::array& nbytes,
                         const py::array& position, const py::array& digest, const py::array& eager,
                         std::size_t digests) {
                 ReplicaRanges ranges{
                     .device = copy_elements<std::int32_t>(device, "device"),
                     .stream = copy_elements<std::uint64_t>(stream, "stream"),
                     .nbytes = copy_elements<std::uint64_t>(nbytes, "nbytes"),
                     .position = copy_elements<std::uint64_t>(position, "position"),
                     .digest = copy_elements<std::uint32_t>(digest, "digest"),
                     .eager = copy_elements<std::uint8_t>(eager, "eager"),
                     .digests = digests};
                 ranges.validate();
                 return std::make_shared<ReplicaRanges>(std::move(ranges));
             }),
             py::kw_only(), "device"_a, "stream"_a, "nbytes"_a, "position"_a, "digest"_a, "eager"_a,
             "digests"_a);
    py::class_<ReadPlan, std::shared_ptr<ReadPlan>>(module, "ReadPlan")
        .def(py::init([](const py::array& dest_nbytes, const py::array& extent_offset,
                         const py::array& extent_length, const py::array& extent_shared,
                         const py::array& extent_span, const py::array& span_offset,
                         const py::array& span_length, const py::array& span_count,
                         const py::array& span_step, const py::array& extent_piece,
                         const py::array& piece_dest, const py::array& piece_dest_offset,
                         const py::array& piece_extent_offset, const py::array& piece_length,
                         const py::array& piece_count, const py::array& piece_extent_step,
                         const py::array& piece_dest_step, const py::array& extent_check,
                         const py::array& check_offset, const py::array& check_length,
                         const py::array& check_crc, const py::array& check_record) {
                 using U64 = std::uint64_t;
                 using I32 = std::int32_t;
                 const ReadPlanArrays arrays{
                     .dest_nbytes = elements<U64>(dest_nbytes, "dest_nbytes"),
                     .extent_offset = elements<U64>(extent_offset, "extent_offset"),
                     .extent_length = elements<U64>(extent_length, "extent_length"),
                     .extent_shared = elements<std::uint8_t>(extent_shared, "extent_shared"),
                     .extent_span = elements<U64>(extent_span, "extent_span"),
                     .span_offset = elements<U64>(span_offset, "span_offset"),
                     .span_length = elements<U64>(span_length, "span_length"),
                     .span_count = elements<U64>(span_count, "span_count"),
                     .span_step = elements<U64>(span_step, "span_step"),
                     .extent_piece = elements<U64>(extent_piece, "extent_piece"),
                     .piece_dest = elements<I32>(piece_dest, "piece_dest"),
                     .piece_dest_offset = elements<U64>(piece_dest_offset, "piece_dest_offset"),
                     .piece_extent_offset =
                         elements<U64>(piece_extent_offset, "piece_extent_offset"),
                     .piece_length = elements<U64>(piece_length, "piece_length"),
                     .piece_count = elements<U64>(piece_count, "piece_count"),
                     .piece_extent_step = elements<U64>(piece_extent_step, "piece_extent_step"),
                     .piece_dest_step = elements<U64>(piece_dest_step, "piece_dest_step"),
                     .extent_check = elements<U64>(extent_check, "extent_check"),
                     .check_offset = elements<U64>(check_offset, "check_offset"),
                     .check_length = elements<U64>(check_length, "check_length"),
                     .check_crc = elements<std::uint32_t>(check_crc, "check_crc"),
                     .check_record = elements<I32>(check_record, "check_record")};
                 const NoGil released;
                 return std::make_shared<ReadPlan>(arrays);
             }),
             py::kw_only(), "dest_nbytes"_a, "extent_offset"_a, "extent_length"_a,
             "extent_shared"_a, "extent_span"_a, "span_offset"_a, "span_length"_a, "span_count"_a,
             "span_step"_a, "extent_piece"_a, "piece_dest"_a, "piece_dest_offset"_a,
             "piece_extent_offset"_a, "piece_length"_a, "piece_count"_a, "piece_extent_step"_a,
             "piece_dest_step"_a, "extent_check"_a, "check_offset"_a, "check_length"_a,
             "check_crc"_a, "check_record"_a);
}

}  // namespace datastates::python
