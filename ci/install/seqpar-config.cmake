# SPDX-License-Identifier: MIT OR Unlicense
# find_package(seqpar): the target seqpar::seqpar, which is headers alone.
if(NOT TARGET seqpar::seqpar)
    add_library(seqpar::seqpar INTERFACE IMPORTED)
    target_include_directories(seqpar::seqpar INTERFACE "${CMAKE_CURRENT_LIST_DIR}/../../../include")
    if(NOT WIN32)
        target_link_libraries(seqpar::seqpar INTERFACE m pthread)
    endif()
endif()
