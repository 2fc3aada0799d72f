"""The names of a table's columns that may hold the owners of its lines."""

import pytest

from zdp_bench.data.owner_names import may_name_owners

OWNERS = """
hospital_patient_id, study_patient, PatientID (anon), Patient (anonymised), Patienten-ID, PatientIDs
patient_study_id, hospitalPatientId, hospitalpatientid, id_patient, num_patient, código_paciente
patient_identifier, DICOM:PatientID, SubjectID_2, hospital MRN, ukb_eid, StudyCaseID, pid_hash
client_id, user id, pseudonym, patients, patient_idx, subject_uuid, participant_ref, person_uuid
brain_patient_id, main_subject_id, site_pat_id, source_patient, patient_seq, pseudo_id_patient
Patientenkennung, patient full name, patient_id_2, user_uuid
"""
FACTS = """
patient_age, PatientSex, Patient Gender, patient_weight, PatientPosition, speaker_gender, is_patient
num_patients, number_of_patients, images_per_patient, age_of_patient, outpatient, patient_in_icu
native_speaker, living_donor, healthy_volunteer, diabetic_patient, icu_patient, image_owner
target_speaker, inpatient_code, outpatient_number, outpatientnumber, annotator_user_id
labeled_by_user_id, patient_index_date, patient_code_status, subject_no_movement, use_case_name
worst_case_index, speaker_code_switching, user_agent
patient_nodule, subject_matter, lesion_count, p_value, case, user, study_id, index, Image Index, (#)
"""


def split(names: str) -> list[str]:
    return [name.strip() for line in names.split("\n") for name in line.split(",") if name]


@pytest.mark.parametrize("column", split(OWNERS))
def test_a_column_of_owners_is_known_whatever_words_its_name_has_besides(column: str) -> None:
    assert may_name_owners(column)


@pytest.mark.parametrize("column", split(FACTS))
def test_a_fact_about_owners_is_no_name(column: str) -> None:
    assert not may_name_owners(column)
